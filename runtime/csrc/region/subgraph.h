// Reads in the middle of a region: computes one pending value while the region continues.
#pragma once

#include "record/recorder.h"

namespace torchtpu {

// The value, computed by a launch of the ops that it needs, beside the region; null where the region is better cut: at
// the end of a stream, where it has been cut before, where computing it again and again costs more.  `is_owner`: the
// thread that records the region reads.  Under state_lock.
BufferRef read_beside(Recorder& r, int32_t value, bool is_owner, const std::string& line);

// Forgets the ops that were recorded for a read alone, so that the stream goes on as if they had not been.  Under
// state_lock.
void leave_speculative_tail(Recorder& r);

}  // namespace torchtpu
