// Calls of Python objects' methods from C++, the GIL held.
#pragma once

#include <pybind11/pybind11.h>

namespace torchtpu {

// Null where the call has raised.  Python's end stops here at a thread that it would unwind (gil.h).
inline PyObject* call_or_null(PyObject* object, const char* name, PyObject* arguments) noexcept {
  PyObject* method = PyObject_GetAttrString(object, name);
  if (!method) return nullptr;
  PyObject* answer = PyObject_CallObject(method, arguments);
  Py_DECREF(method);
  return answer;
}

// Raises pybind11::error_already_set.
template <class... Args>
pybind11::object call_method(pybind11::handle object, const char* name, Args&&... args) {
  auto arguments = pybind11::make_tuple(std::forward<Args>(args)...);
  PyObject* answer = call_or_null(object.ptr(), name, arguments.ptr());
  if (!answer) throw pybind11::error_already_set();
  return pybind11::reinterpret_steal<pybind11::object>(answer);
}

}  // namespace torchtpu
