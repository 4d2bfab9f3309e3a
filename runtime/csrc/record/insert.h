// Adds a node for an op call, with what PyTorch infers of it, to the trie.
#pragma once

#include <string>

#include "record/infer.h"
#include "record/trie.h"

namespace torchtpu {

// Under state_lock.  False where an argument cannot be recorded.
bool insert(Recorder& r, const OpInfo& info, const IValue* args, const Node* fork, const Inferred& inferred,
            std::string line);

}  // namespace torchtpu
