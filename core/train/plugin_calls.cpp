#include "core/train/plugin_calls.hpp"

#include <c10/util/Exception.h>

#include "core/base/error.hpp"
#include "core/base/text.hpp"
#include "core/train/out_of_memory.hpp"

namespace sf {
namespace {

template <class Body>
decltype(auto) named(const std::string& plugin, const char* call, Body&& body) {
  try {
    return body();
  } catch (const Error&) {
    throw;
  } catch (const c10::Error& error) {
    if (is_out_of_memory(error)) {
      throw;   // whoever called knows what can be turned
    }
    throw Error(ExitCode::kInternal, format("plugin \"{}\" failed in {}: {}", plugin, call, error.what_without_backtrace()), "tell the plugin's authors");
  } catch (const std::exception& error) {
    throw Error(ExitCode::kInternal, format("plugin \"{}\" failed in {}: {}", plugin, call, error.what()), "tell the plugin's authors");
  }
}

}  // namespace

Description NamedAlgorithm::describe(const ModelFacts& facts) { return named(name_, "describe", [&] { return plugin_.describe(facts); }); }
Unit& NamedAlgorithm::unit(int64_t index) { return named(name_, "unit", [&]() -> Unit& { return plugin_.unit(index); }); }
void NamedAlgorithm::bind(const TargetTables& tables, Ops& ops) { named(name_, "bind", [&] { plugin_.bind(tables, ops); }); }
Remark NamedAlgorithm::set_token_counts(const std::vector<TokenCount>& counts) { return named(name_, "set_token_counts", [&] { return plugin_.set_token_counts(counts); }); }
void NamedAlgorithm::set_buffers(const std::map<std::string, at::Tensor>& buffers, const std::string& source) {
  named(name_, "set_buffers", [&] { plugin_.set_buffers(buffers, source); });
}
std::map<std::string, at::Tensor> NamedAlgorithm::buffers() const { return named(name_, "buffers", [&] { return plugin_.buffers(); }); }
void NamedAlgorithm::derive_metrics(std::map<std::string, double>& metrics) const { named(name_, "derive_metrics", [&] { plugin_.derive_metrics(metrics); }); }
std::string NamedAlgorithm::prepare(Sample& sample, const SampleContext& context) { return named(name_, "prepare", [&] { return plugin_.prepare(sample, context); }); }
void NamedAlgorithm::finish(Batch& batch) { named(name_, "finish", [&] { plugin_.finish(batch); }); }
double NamedAlgorithm::weigh(const Batch& batch) const { return named(name_, "weigh", [&] { return plugin_.weigh(batch); }); }
void NamedAlgorithm::micro_step(Runner& runner, const Batch& batch) { named(name_, "micro_step", [&] { plugin_.micro_step(runner, batch); }); }
ExportSpec NamedAlgorithm::export_spec() const { return named(name_, "export_spec", [&] { return plugin_.export_spec(); }); }

std::vector<bool> NamedTransform::take_over(const std::vector<LinearSpec>& linears) { return named(name_, "take_over", [&] { return plugin_.take_over(linears); }); }
TransformMemory NamedTransform::memory() const { return named(name_, "memory", [&] { return plugin_.memory(); }); }
void NamedTransform::build(at::Device device, at::ScalarType dtype, Ops& ops) { named(name_, "build", [&] { plugin_.build(device, dtype, ops); }); }
GatherCodec* NamedTransform::codec() { return named(name_, "codec", [&] { return plugin_.codec(); }); }
void NamedTransform::begin_window() { named(name_, "begin_window", [&] { plugin_.begin_window(); }); }
void NamedTransform::encode_weights(int64_t unit, const std::vector<at::Tensor>& whole) { named(name_, "encode_weights", [&] { plugin_.encode_weights(unit, whole); }); }
std::vector<at::Tensor> NamedTransform::linears(const std::vector<LinearProduct>& products, const at::Tensor& x) {
  return named(name_, "linears", [&] { return plugin_.linears(products, x); });
}
at::Tensor NamedTransform::alarms() { return named(name_, "alarms", [&] { return plugin_.alarms(); }); }
bool NamedTransform::replaces(int64_t unit, int64_t parameter) const { return named(name_, "replaces", [&] { return plugin_.replaces(unit, parameter); }); }
std::string NamedTransform::alarm_text(const std::vector<double>& flags) const { return named(name_, "alarm_text", [&] { return plugin_.alarm_text(flags); }); }

void NamedSharding::take_codec(GatherCodec& codec) { named(name_, "take_codec", [&] { plugin_.take_codec(codec); }); }
void NamedSharding::build(const std::vector<UnitSpec>& units, const Placement& placement) { named(name_, "build", [&] { plugin_.build(units, placement); }); }
std::vector<Shard>& NamedSharding::shards() { return plugin_.shards(); }
void NamedSharding::take_tables(const std::vector<at::Tensor>& tables) { named(name_, "take_tables", [&] { plugin_.take_tables(tables); }); }
ShardingMemory NamedSharding::memory(const std::vector<UnitSpec>& units, int64_t ranks, at::ScalarType dtype) const {
  return named(name_, "memory", [&] { return plugin_.memory(units, ranks, dtype); });
}
at::Tensor NamedSharding::whole(int64_t unit, int64_t parameter) { return named(name_, "whole", [&] { return plugin_.whole(unit, parameter); }); }
void NamedSharding::plan(Phase phase, const std::vector<int64_t>& order) { named(name_, "plan", [&] { plugin_.plan(phase, order); }); }
void NamedSharding::begin_window() { named(name_, "begin_window", [&] { plugin_.begin_window(); }); }
void NamedSharding::begin_evaluation() { named(name_, "begin_evaluation", [&] { plugin_.begin_evaluation(); }); }
void NamedSharding::end_evaluation() { named(name_, "end_evaluation", [&] { plugin_.end_evaluation(); }); }
void NamedSharding::before_use(int64_t unit, Phase phase, int64_t uses_left) { named(name_, "before_use", [&] { plugin_.before_use(unit, phase, uses_left); }); }
void NamedSharding::after_use(int64_t unit, Phase phase, int64_t uses_left) { named(name_, "after_use", [&] { plugin_.after_use(unit, phase, uses_left); }); }
void NamedSharding::reduce(int64_t unit, const std::vector<at::Tensor>& gradients) { named(name_, "reduce", [&] { plugin_.reduce(unit, gradients); }); }
std::vector<at::Tensor> NamedSharding::end_window() { return named(name_, "end_window", [&] { return plugin_.end_window(); }); }
at::Tensor NamedSharding::gradient_norm(const std::vector<at::Tensor>& gradients) { return named(name_, "gradient_norm", [&] { return plugin_.gradient_norm(gradients); }); }
void NamedSharding::abandon() { named(name_, "abandon", [&] { plugin_.abandon(); }); }

}  // namespace sf
