"""The engine: open images become work for 8 threads, and results come back in content order."""
