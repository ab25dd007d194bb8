// core/dist/store.hpp: the run's store, a few texts that all ranks see: LibTorch's c10d TCPStore (rank 0 keeps it, or torchrun's agent). It is where ranks
// find each other, compare what they are about to do and leave word when they fail. Small texts only.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/dist/world.hpp"

namespace sf {

class RunStore {
 public:
  /// Opens the server on rank 0 and connects. Waits for rank 0 at most `limit`; `interrupted` is asked meanwhile and may throw.
  /// Throws Error(kCommunication): the port is in use, rank 0 was not there in time, the host is unknown.
  static std::unique_ptr<RunStore> open(const World& world, std::chrono::milliseconds limit, const std::function<void()>& interrupted);
  ~RunStore();
  RunStore(const RunStore&) = delete;
  RunStore& operator=(const RunStore&) = delete;

  /// A connection of its own, for another thread. Each connection serves one thread at a time.
  [[nodiscard]] std::unique_ptr<RunStore> another_connection() const;

  // All throw Error(kCommunication) when the store is gone.
  void set(const std::string& key, const std::string& value);
  /// The value, or nothing when the key is not there. Does not wait.
  [[nodiscard]] std::optional<std::string> find(const std::string& key);
  /// Values in the order of the keys; nothing for those that are not there.
  [[nodiscard]] std::vector<std::optional<std::string>> find_all(const std::vector<std::string>& keys);
  /// Are all of them there? One question, however many keys.
  [[nodiscard]] bool has_all(const std::vector<std::string>& keys);
  /// Sets the key if it is not there. Returns what is there now.
  std::string set_once(const std::string& key, const std::string& value);
  int64_t add(const std::string& key, int64_t value);
  void erase(const std::string& key);

  /// host:port, for messages.
  [[nodiscard]] const std::string& place() const { return place_; }

 private:
  struct Connection;
  RunStore(std::unique_ptr<Connection> connection, std::string place);
  std::unique_ptr<Connection> connection_;
  std::string place_;
};

}  // namespace sf
