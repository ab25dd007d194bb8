// sf/drafter.hpp: the interface "sf.drafter/1" that an algorithm plugin may offer: its draft at work in speculative decoding. The host keeps the sequences,
// the target and its cache; the drafter turns what the target has seen into guesses. A draft without it trains and exports as before, but `eval --speculative`
// and the replay of `export --check` refuse it.
//
// Order of calls for a batch of sequences: remember (the prompt) · then again and again: propose, remember (what the target has gone through since). All
// calls are [main], after Algorithm::bind and set_buffers, without gradient. No state in the drafter: what it needs later it puts into the memory.
//
// Where a sequence stands: its tokens 0 .. a are known, the last one has not gone through the target yet, so the target's states are known at 0 .. a - 1.
//
// Shapes: b sequences · t tokens · k drafted tokens · v vocabulary of the scores
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "sf/unit.hpp"

namespace sf {

/// The units of Algorithm::describe with whole parameters, from a checkpoint or an export.
class DraftUnits {
 public:
  virtual std::vector<at::Tensor> run(int64_t index, const std::vector<at::Tensor>& inputs) = 0;
  /// A unit's parameters and products, for what is done otherwise than in training: one row at a time.
  virtual UnitContext& context(int64_t index) = 0;

 protected:
  ~DraftUnits() = default;
};

/// What a drafter remembers of the sequences; every tensor has them as its first axis, so that the host can drop those that have ended.
struct DraftMemory {
  std::map<std::string, at::Tensor> tensors;
};

/// Tokens that have gone through the target: places starts[b] .. starts[b] + counts[b] - 1 of each sequence. Rows behind a sequence's count are junk, which the
/// next call writes over.
struct SeenTokens {
  std::map<std::string, at::Tensor> features;  // by the name of Description::reads, [b, t, columns], in the type of computation
  at::Tensor next_ids_bt;                      // int64, the token after each
  at::Tensor starts_b, counts_b;               // int64
  int64_t room_tokens = 0;                     // no sequence will ever be longer
};

struct DraftQuestion {
  at::Tensor known_ids_b;   // int64, token a
  at::Tensor positions_b;   // int64, a
  int64_t tokens = 0;       // to draft, within Drafter::drafted_tokens_at_most()
  bool wants_scores = false;
};

struct DraftAnswer {
  at::Tensor ids_bk;        // int64, guesses for a + 1 .. a + k, greedy
  at::Tensor advised_b;     // int64 or undefined: how many of them the draft itself would try
  at::Tensor scores_bkv;    // float32, what each guess was the best of, when wanted
};

class Drafter {
 public:
  /// Features that remember() reads.
  virtual std::vector<std::string> reads() const = 0;
  /// Most tokens of one pass; 0: no limit (a chain).
  virtual int64_t drafted_tokens_at_most() const = 0;
  virtual void remember(DraftUnits& units, DraftMemory& memory, const SeenTokens& seen) const = 0;
  virtual DraftAnswer propose(DraftUnits& units, const DraftMemory& memory, const DraftQuestion& question) const = 0;

 protected:
  ~Drafter() = default;
};

inline constexpr const char* kDrafterInterface = "sf.drafter/1";

}  // namespace sf
