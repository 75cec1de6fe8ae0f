"""The backends: how a graph custom call runs on a device. Each is a module; import the one you mean."""
