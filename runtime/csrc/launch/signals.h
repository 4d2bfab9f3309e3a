// Python's signal handlers wait while the main thread is inside what must not be torn.
//
// CPython runs handlers in the main thread only, between any two bytecodes, once a C handler of its own has noted the
// signal.  So what runs our Python code for the user there puts a C handler in its place that notes the signal for
// later; afterwards the signal is sent again.  Handlers whose signals came before run first, in the user's frame; what
// they raise is held.  So an op is recorded, as on other devices, before a handler's exception leaves the user's line.
#pragma once

namespace torchtpu {

class SignalsDeferred {
 public:
  // Takes the GIL.  Does nothing in other threads, nor within another one.
  SignalsDeferred();
  SignalsDeferred(const SignalsDeferred&) = delete;
  SignalsDeferred& operator=(const SignalsDeferred&) = delete;
  ~SignalsDeferred();

 private:
  bool is_outermost_ = false;
};

// The thread that handlers run in.  The GIL is held.
void set_main_thread();
bool is_main_thread();

// Whether a handler, or what one raised, waits in this thread: what takes long had better end.
bool has_deferred_signal();

// Runs handlers and raises what they raise, or what is held, in the main thread; for waits.  The GIL is held.
void raise_signals();

}  // namespace torchtpu
