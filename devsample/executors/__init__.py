"""Where chains run: in the caller's process, or in spawned ones. One supervisor for both."""
