#include "core/dist/store.hpp"

#include <c10/util/Logging.h>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <charconv>
#include <filesystem>
#include <thread>

#include "core/base/error.hpp"
#include "core/base/file.hpp"

namespace sf {

struct RunStore::Connection {
  c10::intrusive_ptr<c10d::TCPStore> store;
  c10d::TCPStoreOptions options;
  std::string host, prefix;

  std::vector<std::string> full(std::vector<std::string> keys) const {
    for (std::string& key : keys) {
      key = prefix + key;
    }
    return keys;
  }
};

namespace {

constexpr auto kPortPoll = std::chrono::milliseconds(10);

// LibTorch's messages begin with the source line and end in a backtrace: the first sentence is enough.
std::string short_text(const std::exception& error) {
  std::string text = error.what();
  if (const auto* torch = dynamic_cast<const c10::Error*>(&error)) {
    text = torch->what_without_backtrace();
  }
  text = text.substr(0, text.find('\n'));
  const size_t source = text.find("[c10d] ");
  return source == std::string::npos ? text : text.substr(source + 7);
}

template <class Body>
auto asking(const std::string& place, Body&& body) {
  try {
    return body();
  } catch (const std::exception& error) {
    throw Error(ExitCode::kCommunication, "the run's store at " + place + " no longer answers: " + short_text(error),
                "it ends with rank 0; see the messages of that rank");
  }
}

std::vector<uint8_t> bytes_of(const std::string& text) { return {text.begin(), text.end()}; }
std::string text_of(const std::vector<uint8_t>& bytes) { return {bytes.begin(), bytes.end()}; }

// The port that rank 0 took, from the launcher's folder.
int64_t wait_for_port(const World& world, std::chrono::milliseconds limit, const std::function<void()>& interrupted) {
  const auto file = std::filesystem::path(world.folder) / "port";
  const auto end = std::chrono::steady_clock::now() + limit;
  while (!std::filesystem::exists(file)) {
    interrupted();
    if (std::chrono::steady_clock::now() > end) {
      throw Error(ExitCode::kCommunication, format("rank {} waited for rank 0 in vain: it has opened no store", world.rank), "see the messages of rank 0");
    }
    std::this_thread::sleep_for(kPortPoll);
  }
  const std::string text = read_file(file, ExitCode::kCommunication);
  int64_t port = 0;
  if (std::from_chars(text.data(), text.data() + text.size(), port).ec != std::errc() || port < 1 || port > 65535) {
    throw Error(ExitCode::kCommunication, format("{} holds \"{}\", rank 0's port expected", file, text), "start the run again");
  }
  return port;
}

}  // namespace

RunStore::RunStore(std::unique_ptr<Connection> connection, std::string place) : connection_(std::move(connection)), place_(std::move(place)) {}
RunStore::~RunStore() = default;

std::unique_ptr<RunStore> RunStore::open(const World& world, std::chrono::milliseconds limit, const std::function<void()>& interrupted) {
  FLAGS_caffe2_log_level = c10::GLOG_FATAL;  // LibTorch prints a backtrace when a connection ends; what it throws says the same
  if (interrupted) {
    interrupted();  // rank 0 may have left for that reason, and connecting to what is gone takes the whole limit
  }
  const bool is_server = world.is_lead() && !world.store_is_running;
  const bool port_is_told = world.port == 0 && !world.folder.empty();
  SF_CHECK(world.port > 0 || port_is_told, "no port and no folder to learn it from");
  auto connection = std::make_unique<Connection>();
  connection->host = world.host;
  connection->prefix = "sf/" + world.attempt + "/";
  c10d::TCPStoreOptions& options = connection->options;
  options.isServer = is_server;
  options.numWorkers = std::nullopt;
  options.waitWorkers = false;
  options.useLibUV = false;  // that server asks the DNS for the name of each client, which takes 5 s where it does not answer
  options.timeout = limit;
  options.port = static_cast<uint16_t>(port_is_told && !is_server ? wait_for_port(world, limit, interrupted) : world.port);
  const std::string wanted = connection->host + ":" + std::to_string(options.port);
  try {
    connection->store = c10::make_intrusive<c10d::TCPStore>(connection->host, options);
  } catch (const std::exception& error) {
    const std::string text = error.what();
    if (is_server && (text.find("EADDRINUSE") != std::string::npos || text.find("already in use") != std::string::npos)) {
      throw Error(ExitCode::kCommunication, format("port {} is in use, so rank 0 can't open the run's store there", options.port),
                  "is another run on this machine? choose another port: --rendezvous HOST:PORT, or MASTER_PORT under other launchers");
    }
    if (is_server) {
      throw Error(ExitCode::kCommunication, format("rank 0 can't open the run's store at {}: {}", wanted, short_text(error)),
                  "the host of --rendezvous or MASTER_ADDR is to be the machine of rank 0, as the others see it");
    }
    throw Error(ExitCode::kCommunication, format("rank {} does not reach rank 0's store at {}: {}", world.rank, wanted, short_text(error)),
                "is rank 0 running, is the port open between the machines?");
  }
  options.port = connection->store->getPort();
  options.isServer = false;
  const std::string place = connection->host + ":" + std::to_string(options.port);
  if (is_server && port_is_told) {
    atomic_write(std::filesystem::path(world.folder) / "port", std::to_string(options.port), ExitCode::kCommunication);
  }
  return std::unique_ptr<RunStore>(new RunStore(std::move(connection), place));
}

std::unique_ptr<RunStore> RunStore::another_connection() const {
  return asking(place_, [&] {
    auto copy = std::make_unique<Connection>();
    copy->host = connection_->host;
    copy->prefix = connection_->prefix;
    copy->options = connection_->options;
    copy->store = c10::make_intrusive<c10d::TCPStore>(copy->host, copy->options);
    return std::unique_ptr<RunStore>(new RunStore(std::move(copy), place_));
  });
}

void RunStore::set(const std::string& key, const std::string& value) {
  asking(place_, [&] { connection_->store->set(connection_->prefix + key, bytes_of(value)); });
}

std::optional<std::string> RunStore::find(const std::string& key) {
  return asking(place_, [&]() -> std::optional<std::string> {
    const std::string full = connection_->prefix + key;
    if (!connection_->store->check({full})) {
      return std::nullopt;
    }
    return text_of(connection_->store->get(full));
  });
}

bool RunStore::has_all(const std::vector<std::string>& keys) {
  return asking(place_, [&] { return connection_->store->check(connection_->full(keys)); });
}

std::vector<std::optional<std::string>> RunStore::find_all(const std::vector<std::string>& keys) {
  std::vector<std::optional<std::string>> values;
  values.reserve(keys.size());
  if (!keys.empty() && has_all(keys)) {
    for (const auto& bytes : asking(place_, [&] { return connection_->store->multiGet(connection_->full(keys)); })) {
      values.emplace_back(text_of(bytes));
    }
    return values;
  }
  for (const std::string& key : keys) {
    values.push_back(find(key));
  }
  return values;
}

std::string RunStore::set_once(const std::string& key, const std::string& value) {
  return asking(place_, [&] { return text_of(connection_->store->compareSet(connection_->prefix + key, {}, bytes_of(value))); });
}

int64_t RunStore::add(const std::string& key, int64_t value) {
  return asking(place_, [&] { return connection_->store->add(connection_->prefix + key, value); });
}

void RunStore::erase(const std::string& key) {
  asking(place_, [&] { connection_->store->deleteKey(connection_->prefix + key); });
}

}  // namespace sf
