"""Whether a run is slower than another, or than those before it: verdicts, history, noise, settings in turns."""
