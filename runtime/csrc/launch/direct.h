// Direct launches: in comes a work whose plan has been launched before, out go its buffers, without the engine between.
//
// What the engine found out once, which programs run in which order on which values, is kept with the plan.  A launch
// takes this way where nothing is to be decided: no input has failed or is guarded, what it takes of a limited memory
// is surely there, and no setting has changed since.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <map>

#include "launch/queue.h"

namespace torchtpu {

// A program's run-time numbers: some of the work's, and constants after them; uploaded where they are not those of the
// last launch.
struct DirectNumbers {
  bool are_all = true;  // the work's, as they are
  std::vector<int64_t> taken;
  std::vector<int64_t> constants;
  std::string data;
  pybind11::object array;
};

struct DirectStep {
  pybind11::object executable, handlers;
  pybind11::object program;                           // what the context knows the executable as
  std::vector<int32_t> inputs, outputs, dying;        // slots
  mutable std::optional<DirectNumbers> floats, ints;  // with the last launch's arrays
  bool has_checks = false;                            // the last output says which have failed
};

// The launches of programs so far, by tier.  The GIL guards it; a tier's number stays where it is.
struct LaunchCounts {
  std::map<std::string, int64_t> by_tier;
};

// The GIL is held wherever this is used.
struct DirectLaunch {
  pybind11::object client, context;  // `context` knows whether checks have passed, and what of the memory is free
  pybind11::object needed_bytes;     // beyond arguments, where the context accounts for memory and launches; else null
  std::shared_ptr<LaunchCounts> counts;
  PyTypeObject* array_type = nullptr;
  std::vector<DirectStep> steps;
  std::vector<std::pair<int64_t*, int64_t>> tiers;  // of `counts`, and how many steps are of each
  std::vector<int32_t> outputs;                     // slots; those of the inputs come first
  size_t num_slots = 0;
  int64_t left = 0;   // launches until the engine is asked again
  int64_t taken = 0;  // launches so far
  uint64_t settings = 0;
  bool is_deterministic = false;
};

// Something has changed that the engine looks at when it launches.
void forget_direct_launches();
// Whether the work would be launched directly.
bool is_direct(const Work& work);
// Whether it would, by a thread that reads: nothing is to be waited for, and what runs Python is done here.  A signal
// handler's exception, or one that another thread has sent, is raised before anything is launched: a launch that began
// runs no bytecode, and so raises none.
bool prepare_directly(const Work& work);
// Launches the work, if that may be done directly; whether it was.
bool launch_directly(const WorkRef& work);
// The engine goes on with the work from this step on, which was not launched for an error, or of which a check has
// failed: `values` are those of the slots, `launched` is what the step's launch returned.  Both may be None.
void resume(const WorkRef& work, size_t step, PyObject* values, PyObject* error, PyObject* launched);
void bind_direct(pybind11::module& m);

}  // namespace torchtpu
