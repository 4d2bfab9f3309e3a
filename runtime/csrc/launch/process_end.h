// What becomes of the other threads while Python ends.
//
// Python before 3.14 ends a thread that asks for the GIL then with pthread_exit, which unwinds its stack: destructors
// release Python objects without the GIL, a `noexcept` frame calls std::terminate, and a `catch (...)`, which each
// binding library has around what it calls, makes glibc abort.  So such a thread waits here for the process to end by
// itself, as it does with Python 3.14.
#pragma once

namespace torchtpu {

// When the extension is loaded: a thread that is unwound up to a `noexcept` frame waits there.
void install_terminate_handler();
// Once Python is about to end: it unwinds no thread any more.
void keep_threads_from_exiting();
// For the case that a thread is inside XLA when the process ends: nothing that it uses may be destroyed.  Python ends
// as ever, with the same status.
void exit_without_destructors();
// For the case that nobody has caught a KeyboardInterrupt.  Python then ends with the signal, unless some thread has
// run the text of a program since, as classes of data are made; its status would be 1.
void exit_as_interrupted();

}  // namespace torchtpu
