"""Runs: Lightning behind `softmaxfree fit`, `validate` and `test`."""
