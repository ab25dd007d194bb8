// The plugin's manifest, without its library: every option reads, and each rule speaks where it should.
#include <doctest/doctest.h>

#include <string>
#include <vector>

#include "tests/draft/manifest_judgement.hpp"

namespace {

std::string judged(const std::vector<std::string>& sets) { return sf::testing::judged_by("dflash2", sets); }

}  // namespace

TEST_CASE("dflash2 manifest: defaults are silent, a setting without effect is warned about, a wrong one is refused") {
  CHECK(judged({}) == "");
  CHECK(judged({"training.kl_decay=2.0"}) == "dflash2/kl-without-lambda");
  CHECK(judged({"training.kl_decay=2.0", "training.lk_loss_type=\"lambda\""}) == "");
  CHECK(judged({"training.loss_type=\"dpace\"", "training.loss_decay_gamma=7.0"}) == "dflash2/decay-with-dpace");
  CHECK(judged({"training.loss_decay_gamma=7.0"}) == "");
  CHECK(judged({"training.dpace_alpha=1.5", "training.loss_type=\"dpace\""}) == "recipe/out-of-range");
  CHECK(judged({"training.num_anchors=0"}) == "recipe/out-of-range");
  CHECK(judged({"training.loss_type=\"dspace\""}) != "");
  CHECK(judged({"algorithm.selector_policy=\"gold\""}) != "");
  CHECK(judged({"plugin.dflash2.selector_rank=\"wide\""}) != "");
}

TEST_CASE("dflash2 manifest: what only D-PACE or the lambda mix reads is warned about without them") {
  CHECK(judged({"training.kl_scale=2.0"}) == "dflash2/kl-scale-without-lambda");
  CHECK(judged({"training.kl_scale=2.0", "training.lk_loss_type=\"lambda\""}) == "");
  CHECK(judged({"training.dpace_alpha=0.25"}) == "dflash2/dpace-alpha-without-dpace");
  CHECK(judged({"plugin.dflash2.dpace_normalization=\"batch\""}) == "dflash2/dpace-normalization-without-dpace");
  CHECK(judged({"training.dpace_alpha=0.25", "plugin.dflash2.dpace_normalization=\"batch\"", "training.loss_type=\"dpace\""}) == "");
}

TEST_CASE("dflash2 manifest: what only a selector or a convolution reads is warned about for a draft without them") {
  struct Row {
    const char* set;
    const char* id;
  };
  for (const Row& row : {Row{"training.dflash2_selector_loss_alpha=0.5", "dflash2/loss-alpha-without-selector"},
                         Row{"training.dflash2_selector_warmup_ratio=0.5", "dflash2/warmup-without-selector"},
                         Row{"training.dflash2_selector_ramp_ratio=0.5", "dflash2/ramp-without-selector"},
                         Row{"training.dflash2_selector_stop_gradient=true", "dflash2/stop-gradient-without-selector"},
                         Row{"algorithm.selector_policy=\"insert_gold\"", "dflash2/policy-without-selector"},
                         Row{"plugin.dflash2.selector_rank=8", "dflash2/rank-without-selector"},
                         Row{"plugin.dflash2.selector_top_k=8", "dflash2/top-k-without-selector"},
                         Row{"plugin.dflash2.conv_kernel_size=3", "dflash2/kernel-without-convolution"},
                         Row{"plugin.dflash2.conv_group_size=8", "dflash2/group-without-convolution"}}) {
    CHECK(judged({row.set}) == "");
    CHECK(judged({row.set, "plugin.dflash2.architecture=\"dflash\""}) == row.id);
  }
}

TEST_CASE("dflash2 manifest: an option for a configuration made here is refused next to one that is named") {
  struct Row {
    const char* set;
    const char* id;
  };
  for (const Row& row : {Row{"plugin.dflash2.architecture=\"dflash\"", "dflash2/architecture-and-config"},
                         Row{"plugin.dflash2.conv_kernel_size=3", "dflash2/kernel-and-config"},
                         Row{"plugin.dflash2.conv_group_size=8", "dflash2/group-and-config"},
                         Row{"plugin.dflash2.selector_rank=8", "dflash2/rank-and-config"},
                         Row{"plugin.dflash2.selector_top_k=2", "dflash2/top-k-and-config"}}) {
    CHECK(judged({row.set}) == "");
    CHECK(judged({row.set, "model.draft_model_config=\"draft.json\""}) == row.id);
  }
  CHECK(judged({"model.draft_model_config=\"draft.json\""}) == "");
  CHECK(judged({"model.draft_model_config=\"draft.json\"", "plugin.dflash2.selector_top_k=0", "plugin.dflash2.architecture=\"auto\""}) == "");  // as a saved recipe says
  // What would be made anyway is a wish beside a configuration that may say otherwise.
  CHECK(judged({"model.draft_model_config=\"draft.json\"", "plugin.dflash2.selector_top_k=16"}) == "dflash2/top-k-and-config");
  CHECK(judged({"model.draft_model_config=\"draft.json\"", "plugin.dflash2.architecture=\"dflash2\""}) == "dflash2/architecture-and-config");
}

TEST_CASE("dflash2 manifest: a block is no longer than a sample may be") {
  CHECK(judged({"model.draft_block_size=64", "data.max_length=48"}) == "dflash2/block-longer-than-samples");
  CHECK(judged({"model.draft_block_size=48", "data.max_length=48"}) == "");
}
