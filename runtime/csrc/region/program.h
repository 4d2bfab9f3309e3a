// Conversion of a recorded path of the trie into Python's runtime.ir.program.Program.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include "record/trie.h"

namespace torchtpu {

namespace py = pybind11;

// The GIL is held; state_lock is not.
py::object make_program(const Node* node, const std::vector<BaseRef>& inputs, const std::vector<int32_t>& outputs,
                        const std::vector<uint8_t>& donated, const std::string& line);

}  // namespace torchtpu
