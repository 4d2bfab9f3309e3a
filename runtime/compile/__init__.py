"""From text to loaded executables: plans, the compiler's threads, and variants of hot programs."""
