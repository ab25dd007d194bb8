// The verb `export`: a checkpoint's weights as a folder that serving engines load.
#include <ATen/ATen.h>

#include "core/base/error.hpp"
#include "core/base/log.hpp"
#include "core/checkpoint/resume.hpp"
#include "core/checkpoint/retention.hpp"
#include "core/data/safetensors.hpp"
#include "core/export/hf_export.hpp"
#include "core/model/tensor_view.hpp"
#include "core/plan/plan.hpp"
#include "core/train/decoding_setup.hpp"
#include "core/train/export_check.hpp"
#include "core/train/saved_run.hpp"
#include "core/train/session.hpp"
#include "core/train/verbs.hpp"

namespace sf {
namespace {

// As serving wants it, whatever the run computed in.
at::ScalarType exported_type(const Plan& plan) { return plan.get<std::string>("export.dtype") == "bfloat16" ? at::kBFloat16 : at::kFloat; }

}  // namespace

Json export_draft(const EngineContext& context, const ExportArguments& arguments) {
  const Plan& plan = *context.plan;
  if (arguments.output.empty()) {
    throw Error(ExitCode::kUsage, "no folder to export to is named", "give --output FOLDER");
  }
  NamedAlgorithm algorithm(algorithm_of(context), plan.get<std::string>("algorithm.name"));
  const Description description = algorithm.describe(model_facts(plan));
  const std::filesystem::path run_folder = plan.get<std::filesystem::path>("output_dir") / plan.get<std::string>("run_id");
  const auto checkpoint = open_checkpoint(run_folder, arguments.checkpoint);
  if (!checkpoint) {
    throw Error(ExitCode::kCheckpoint, run_folder.string() + " holds no complete checkpoint", "train first");
  }
  require_same_draft(*checkpoint, description.draft_config_json);
  const auto checked = [&](Json summary) {
    if (arguments.check) {
      summary.set("check", check_export({.context = &context, .checkpoint = &*checkpoint, .folder = std::filesystem::absolute(arguments.output), .features = arguments.features}));
    }
    return summary;
  };
  if (!arguments.write) {
    if (!std::filesystem::is_directory(arguments.output)) {
      throw Error(ExitCode::kUsage, arguments.output + " is no folder", "--check-only looks at an export that is there");
    }
    return checked(Json::object({{"folder", std::filesystem::absolute(arguments.output).string()}, {"step", checkpoint->state().step}}));
  }

  if (arguments.check && !arguments.features.empty() && !std::filesystem::is_directory(arguments.features)) {
    throw Error(ExitCode::kUsage, format("--features {}: there is no such folder", arguments.features), "name a folder of captured features, or leave it out: then the recipe's are replayed");
  }
  const ExportSpec spec = algorithm.export_spec();
  HfExport request;
  request.folder = std::filesystem::absolute(arguments.output);
  request.config = Json::parse(spec.config_json, "config.json");
  request.contract.config_keys = spec.required_config_keys;
  const at::ScalarType type = exported_type(plan);
  request.dtype = dtype_name(dtype_of(type));
  request.config.set("dtype", type == at::kBFloat16 ? "bfloat16" : "float32");
  std::vector<at::Tensor> kept;
  int64_t parameters = 0;
  for (const ParameterSpec& wanted : spec.tensors) {
    request.contract.tensors.push_back({.name = wanted.name, .shape = wanted.shape});
    const SavedTensor& saved = checkpoint->tensor("weights/" + wanted.name);
    const bool is_wide = saved.dtype == "F32";
    at::Tensor tensor = at::empty(saved.shape, at::TensorOptions().dtype(is_wide ? at::kFloat : at::kBFloat16));
    checkpoint->read("weights/" + wanted.name, {static_cast<std::byte*>(tensor.data_ptr()), tensor.nbytes()});
    tensor = tensor.to(type);
    kept.push_back(tensor);
    parameters += tensor.numel();
    request.tensors.push_back({.name = wanted.name, .dtype = request.dtype, .shape = saved.shape, .data = tensor.const_data_ptr(), .bytes = tensor.nbytes()});
  }
  for (const BufferSpec& wanted : spec.buffers) {
    const std::string type_name = dtype_name(dtype_of(wanted.dtype));
    request.contract.tensors.push_back({.name = wanted.name, .shape = wanted.shape, .dtype = type_name});
    const SavedTensor& saved = checkpoint->tensor("buffers/" + wanted.name);
    at::Tensor tensor = at::empty(saved.shape, at::TensorOptions().dtype(wanted.dtype));
    checkpoint->read("buffers/" + wanted.name, {static_cast<std::byte*>(tensor.data_ptr()), tensor.nbytes()});
    kept.push_back(tensor);
    request.tensors.push_back({.name = wanted.name, .dtype = saved.dtype, .shape = saved.shape, .data = tensor.const_data_ptr(), .bytes = tensor.nbytes()});
  }
  request.origin.set("run", checkpoint->state().run_id).set("step", checkpoint->state().step);
  // --checkpoint may name a step of another run, whose score is not in this recipe's run.
  if (const auto best = read_best(checkpoint->folder().parent_path()); best && best->step == checkpoint->state().step) {
    request.origin.set(best->metric, best->score);
  }
  request.origin.set("target_fingerprint", checkpoint->state().target_fingerprint);
  request.origin.set("algorithm", plan.get<std::string>("algorithm.name")).set("drafted_tokens", trained_tokens(description));
  write_hf_export(request);
  log_info("exported step {} ({} parameters, {}) to {}", checkpoint->state().step, human_count(static_cast<uint64_t>(parameters)), request.dtype,
           request.folder.string());
  log_info("{}", spec.engine_note);

  Json json = Json::object();
  json.set("folder", request.folder.string()).set("step", checkpoint->state().step).set("parameters", parameters);
  json.set("engine_note", spec.engine_note);
  return checked(std::move(json));
}

}  // namespace sf
