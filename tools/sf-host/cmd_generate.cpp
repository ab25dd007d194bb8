// sf-host generate: the target answers the prompts of token records.
#include <cstdio>

#include "core/base/text.hpp"
#include "tools/sf-host/run_session.hpp"

namespace sf {

ExitCode run_generate(const Command& command) {
  const DecodingFlags& flags = command.decoding;
  if (command.output.empty()) {
    throw Error(ExitCode::kUsage, "generate needs --output, the JSONL file to write", "for example --output data/answers.jsonl");
  }
  const auto at_least = [](const char* flag, double value, double least) {
    if (!(value >= least)) {
      throw Error(ExitCode::kUsage, format("{} {}", flag, value), format("at least {}", least));
    }
  };
  // Beyond, float32 has no more than one token left, or all alike.
  if (flags.temperature != 0 && !(flags.temperature >= 0.001 && flags.temperature <= 1000)) {
    throw Error(ExitCode::kUsage, format("--temperature {}", flags.temperature), "0, which takes the best token, or 0.001 to 1000");
  }
  at_least("--top-k", static_cast<double>(flags.top_k), 0);
  if (!(flags.top_p > 0 && flags.top_p <= 1)) {
    throw Error(ExitCode::kUsage, format("--top-p {}", flags.top_p), "a probability above 0, at most 1");
  }
  if (flags.temperature == 0 && (flags.top_p < 1 || flags.top_k > 0 || flags.seed != 0)) {
    throw Error(ExitCode::kUsage, "--top-p, --top-k and --seed do nothing without --temperature: the best token is taken", "add --temperature 0.7, or leave them out");
  }
  RunSession session(command);
  if (!session.plan(true) || !session.open(false)) {
    return session.code();
  }
  Json summary = session.engine().generate(session.context(), {.prompts = flags.prompts,
                                                               .output = command.output,
                                                               .max_prompts = flags.max_prompts,
                                                               .max_new_tokens = flags.max_new_tokens > 0 ? flags.max_new_tokens : 256,
                                                               .batch_size = flags.batch_size,
                                                               .temperature = flags.temperature,
                                                               .top_p = flags.top_p,
                                                               .top_k = flags.top_k,
                                                               .seed = flags.seed,
                                                               .stop_tokens = flags.stop_tokens});
  if (command.json) {
    std::puts(summary.dump(2).c_str());
  }
  session.close();
  return summary.contains("interrupted") ? ExitCode::kInterrupted : ExitCode::kOk;
}

}  // namespace sf
