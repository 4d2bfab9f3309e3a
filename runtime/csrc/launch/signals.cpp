#include "launch/signals.h"

#include <pthread.h>
#include <torch/csrc/utils/pybind.h>

#include <array>
#include <atomic>
#include <csignal>
#include <deque>
#include <vector>

#include "bind/bridge.h"
#include "device/gil.h"

namespace torchtpu {

namespace {

std::atomic<unsigned long> main_thread{0};

// C handlers read and write these in any thread, everything else in the main thread.
std::array<std::atomic<bool>, NSIG> is_noted{};
std::atomic<bool> is_any_noted{false};
std::atomic<bool> is_deferring{false};

struct Replaced {
  int signal;
  struct sigaction action;
};
std::array<Replaced, NSIG> replaced;
size_t num_replaced = 0;

// What handlers have raised that the user has yet to get; of the main thread alone.
std::deque<PyObject*>* held = new std::deque<PyObject*>();

void hold_raised() {
  PyObject *type, *value, *traceback;
  PyErr_Fetch(&type, &value, &traceback);
  PyErr_NormalizeException(&type, &value, &traceback);
  if (traceback) PyException_SetTraceback(value, traceback);
  Py_XDECREF(type);
  Py_XDECREF(traceback);
  held->push_back(value);
}

// With a Python error set where something was held.
bool set_held() {
  if (held->empty()) return false;
  PyObject* value = held->front();
  held->pop_front();
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(value)), value);
  Py_DECREF(value);
  return true;
}

// CPython calls this between two bytecodes, as it calls signal handlers.
int raise_held(void*) {
  if (is_deferring || !set_held()) return 0;  // where it is too early, it is asked for again
  if (!held->empty()) Py_AddPendingCall(&raise_held, nullptr);
  return -1;
}

void run_handlers() {
  while (PyErr_CheckSignals() != 0) hold_raised();
}

// Sends a signal to Python once more.
void deliver(int signal) {
  sigset_t blocked;
  bool is_blocked = pthread_sigmask(SIG_BLOCK, nullptr, &blocked) != 0 || sigismember(&blocked, signal) == 1;
  if (is_blocked) {
    PyErr_SetInterruptEx(signal);  // as where another thread had taken it
  } else {
    raise(signal);
  }
}

void note(int signal) {
  is_noted[signal] = is_any_noted = true;
  // The main thread may have looked already, where this is another one.
  if (!is_deferring && is_noted[signal].exchange(false)) PyErr_SetInterruptEx(signal);
}

// Signals that are raised by what a thread does cannot wait.
bool may_wait(int signal) {
  switch (signal) {
    case SIGABRT:
    case SIGBUS:
    case SIGFPE:
    case SIGILL:
    case SIGSEGV:
    case SIGSYS:
    case SIGTRAP:
      return false;
    default:
      return true;
  }
}

// What Python runs for one signal: a callable, a number for what the system does, or None for a handler in C.  Python
// tells nobody where a handler is set, so each launch asks for all signals, by the C function of `signal.getsignal`.
class HandlerOf {
 public:
  HandlerOf() {
    getsignal_ = pybind11::object(pybind11::module_::import("_signal").attr("getsignal")).release().ptr();
    TORCH_INTERNAL_ASSERT(PyCFunction_CheckExact(getsignal_) && PyCFunction_GetFlags(getsignal_) == METH_O);
    function_ = PyCFunction_GetFunction(getsignal_);
    module_ = PyCFunction_GetSelf(getsignal_);
  }

  pybind11::object operator()(PyObject* number) const {
    return pybind11::reinterpret_steal<pybind11::object>(function_(module_, number));
  }

 private:
  PyObject* getsignal_;
  PyCFunction function_;
  PyObject* module_;
};

void replace_handlers() {
  static const auto* handler_of = new HandlerOf();
  static const auto* candidates = [] {
    auto* found = new std::vector<std::pair<int, PyObject*>>();
    for (auto number : pybind11::module_::import("_signal").attr("valid_signals")()) {
      int signal = number.cast<int>();
      if (may_wait(signal) && signal != SIGKILL && signal != SIGSTOP && signal < NSIG) {
        found->emplace_back(signal, PyLong_FromLong(signal));
      }
    }
    return found;
  }();
  struct sigaction ours = {};
  ours.sa_handler = &note;
  ours.sa_flags = SA_RESTART | SA_ONSTACK;
  sigemptyset(&ours.sa_mask);
  num_replaced = 0;
  is_any_noted = false;
  is_deferring = true;
  for (const auto& [signal, number] : *candidates) {
    pybind11::object handler = (*handler_of)(number);
    if (!handler) {
      PyErr_Clear();
      continue;
    }
    if (!PyCallable_Check(handler.ptr())) continue;
    Replaced& entry = replaced[num_replaced];
    entry.signal = signal;
    if (sigaction(signal, &ours, &entry.action) == 0) num_replaced++;
  }
}

// Async-signal-safe: a forked child calls it too.
void restore_handlers() {
  for (size_t i = 0; i < num_replaced; i++) {
    struct sigaction now;
    sigaction(replaced[i].signal, &replaced[i].action, &now);
    if (now.sa_handler != &note) sigaction(replaced[i].signal, &now, nullptr);  // somebody has set it meanwhile
  }
}

void deliver_noted() {
  is_deferring = false;
  for (size_t i = 0; i < num_replaced; i++) {
    int signal = replaced[i].signal;
    if (is_noted[signal].exchange(false)) deliver(signal);
  }
  num_replaced = 0;
  is_any_noted = false;
}

[[maybe_unused]] const bool fork_handler = [] {
  pthread_atfork(nullptr, nullptr, [] {
    restore_handlers();
    is_deferring = false;
    num_replaced = 0;
    for (auto& noted : is_noted) noted = false;  // the parent's
    main_thread = PyThread_get_thread_ident();
  });
  return true;
}();

}  // namespace

void set_main_thread() {
  auto thread = pybind11::module_::import("threading").attr("main_thread")();
  main_thread = thread.attr("ident").cast<unsigned long>();
}

bool is_main_thread() { return PyThread_get_thread_ident() == main_thread.load(std::memory_order_relaxed); }

bool has_deferred_signal() { return is_main_thread() && (is_any_noted || !held->empty()); }

void raise_signals() {
  if (!is_main_thread()) return;
  if ((!is_deferring && set_held()) || PyErr_CheckSignals() != 0) throw_python_error();
}

SignalsDeferred::SignalsDeferred() {
  if (!is_main_thread() || is_deferring || !Py_IsInitialized()) return;
  AcquireGil gil;
  pybind11::error_scope raised;  // where an error is on its way
  run_handlers();
  replace_handlers();
  run_handlers();  // those whose signals came just before
  is_outermost_ = true;
}

SignalsDeferred::~SignalsDeferred() {
  if (!is_outermost_) return;
  restore_handlers();
  deliver_noted();
  if (!held->empty()) Py_AddPendingCall(&raise_held, nullptr);
}

}  // namespace torchtpu
