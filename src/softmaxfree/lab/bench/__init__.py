"""Measurements: contestants side by side in one run, with what they were measured on."""
