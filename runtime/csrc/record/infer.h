// Shape inference for a call seen for the first time.
#pragma once

#include <memory>

#include "record/recorder.h"

namespace torchtpu {

struct Inferred {
  Stack args;  // after the call: an out= argument may have been resized
  Stack results;
};

// Raises PyTorch's own error for a bad call.  Null where the result's shape depends on data, or has no inference: the
// op then runs on the CPU.
std::shared_ptr<const Inferred> infer(const OpInfo& info, const c10::OperatorHandle& op, const IValue* args);

// Whether the CPU raises for these dtypes.
bool is_refused_by_cpu(const OpInfo& info, const c10::OperatorHandle& op, const IValue* args);

}  // namespace torchtpu
