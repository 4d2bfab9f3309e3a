// Runs a program of XLA's by way of jaxlib, without a bytecode of Python's in between.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace torchtpu {

// A launch's arrays, which `handlers` make and which may still be pending, and the token of the launch.  The arguments
// that the program takes are gone once it is enqueued: no signal handler, which runs between two bytecodes, may come
// before the arrays are there.
pybind11::tuple execute(pybind11::object executable, pybind11::object arguments, pybind11::object handlers);

}  // namespace torchtpu
