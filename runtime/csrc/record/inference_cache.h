// What shape inference found for calls that were seen before, wherever in an op stream they stood.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>

#include "record/infer.h"

namespace torchtpu {

constexpr double kLargestOfAll = 448;       // fits every floating dtype
constexpr double kLargestOfIntegers = 127;  // and every other one

// All that the inference of a call may depend on, as bytes: the op, each argument by value, each tensor by dtype,
// device, geometry and which of the call's storages it lies in, and PyTorch's settings that choose results or errors.
// Nothing for a call with an argument of another kind.
std::optional<std::string> signature_of(const OpInfo& info, const IValue* args);

// Bounded: what was not asked for while some thousands of other signatures were is forgotten.  Any thread may ask.
std::shared_ptr<const Inferred> find_inferred(const std::string& signature);
void keep_inferred(std::string signature, std::shared_ptr<const Inferred> inferred);

// Inferences that no signature answered; those among them that ran a meta kernel, by op.
struct InferenceCounts {
  int64_t all = 0;
  std::map<std::string, int64_t> on_meta;
};
void count_inference(const OpInfo& info, bool is_on_meta);
InferenceCounts inference_counts();
void reset_inference_counts();

}  // namespace torchtpu
