// Python's signal handlers wait while the main thread is inside what must not be torn.
//
// CPython runs handlers in the main thread only, between any two bytecodes, once a C handler of its own has noted the
// signal.  So what runs our Python code for the user there puts a C handler in its place that notes the signal for
// later; afterwards the signal is sent again.  A handler's exception then leaves the user's own call.
#pragma once

namespace torchtpu {

class SignalsDeferred {
 public:
  // Takes the GIL.  Raises what handlers raise whose signals came before, so that nothing has begun then.  Does nothing
  // in other threads, nor within another one.
  SignalsDeferred() : SignalsDeferred(Before::kRaise) {}
  // Where raising would tear, handlers of earlier signals wait too.
  enum class Before { kRaise, kWait };
  explicit SignalsDeferred(Before before);
  SignalsDeferred(const SignalsDeferred&) = delete;
  SignalsDeferred& operator=(const SignalsDeferred&) = delete;
  ~SignalsDeferred();

 private:
  bool is_outermost_ = false;
};

// The thread that handlers run in.  The GIL is held.
void set_main_thread();
bool is_main_thread();

// Whether a handler waits, in this thread: what takes long had better end.
bool has_deferred_signal();

}  // namespace torchtpu
