"""Names of other devices and libraries that mean this device."""
