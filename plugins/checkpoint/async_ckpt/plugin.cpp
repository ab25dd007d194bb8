// async_ckpt: "sf.checkpoint-writer/1" over a pool of threads.
#include <memory>
#include <string_view>

#include "plugins/checkpoint/async_ckpt/writer_pool.hpp"
#include "sf/checkpoint.h"
#include "sf/plugin.hpp"

namespace {

class AsyncCheckpoint final {
 public:
  AsyncCheckpoint(const sf::Host& host, const sf::Options& options)
      : host_(host),
        settings_{.threads = options.get<std::int64_t>("threads"), .bandwidth = options.get<std::int64_t>("bandwidth")},
        pool_(settings_) {
    options.report_effect("threads", settings_.threads);
    options.report_effect("bandwidth", settings_.threads);
  }

  void start() {
    pool_.start();
    host_.log(sf::Level::kDebug, std::to_string(settings_.threads) + " threads write checkpoints");
  }
  void stop() { pool_.stop(); }
  const void* get_interface(std::string_view id) { return id == SF_CHECKPOINT_WRITER ? &kWriter : nullptr; }

 private:
  static sf::WriterPool& pool(sf_instance* instance) { return sf::PluginCalls<AsyncCheckpoint>::self(instance).pool_; }

  // A failed write is a status of its own kind; what else is thrown the guard turns into one.
  static std::int32_t told(sf_status* status, bool is_fine, const sf::WriteFailure& failure) {
    if (!is_fine) {
      sf::set_status(status, SF_IO, failure.what, failure.hint);
    }
    return is_fine ? SF_OK : SF_IO;
  }
  template <class Call>
  static std::int32_t call(sf_status* status, Call&& body) {
    std::int32_t code = SF_OK;
    const std::int32_t thrown = sf::guard(status, [&] { code = body(); });
    return thrown != SF_OK ? thrown : code;
  }

  static std::int32_t begin(sf_instance* instance, const char* directory, std::int64_t step, sf_status* status) {
    return sf::guard(status, [&] { pool(instance).begin(directory, step); });
  }
  static std::int32_t put(sf_instance* instance, const sf_write* piece, void (*release)(void*), sf_status* status) {
    return call(status, [&] {
      sf::WriteFailure failure;
      const bool is_fine = pool(instance).put(piece->file, piece->offset, piece->data, piece->bytes, release, piece->lease, failure);
      return told(status, is_fine, failure);
    });
  }
  static std::int32_t finish(sf_instance* instance, sf_status* status) {
    return sf::guard(status, [&] { pool(instance).finish(); });
  }
  static std::int32_t poll(sf_instance* instance, std::int64_t* done_step, sf_status* status) {
    return call(status, [&] {
      sf::WriteFailure failure;
      const bool is_fine = pool(instance).poll(*done_step, failure);
      return told(status, is_fine, failure);
    });
  }
  static std::int32_t wait(sf_instance* instance, std::int64_t timeout_ms, sf_status* status) {
    return call(status, [&] {
      sf::WriteFailure failure;
      const bool is_fine = pool(instance).wait(timeout_ms, failure);
      return told(status, is_fine, failure);
    });
  }

  static constexpr sf_checkpoint_writer kWriter = {sizeof(sf_checkpoint_writer), 0, &begin, &put, &finish, &poll, &wait};

  sf::Host host_;
  sf::WriterSettings settings_;
  sf::WriterPool pool_;
};

}  // namespace

SF_PLUGIN(AsyncCheckpoint, SF_KIND_CHECKPOINT, SF_TIER_C)
