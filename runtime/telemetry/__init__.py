"""What the engine says of itself: counters, observers, log lines, and the compiler's account of costs."""
