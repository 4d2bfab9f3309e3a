// The c10d backend's Python surface.
#pragma once

#include <pybind11/pybind11.h>

namespace torchtpu {

void bind_process_group(pybind11::module_& m);

}  // namespace torchtpu
