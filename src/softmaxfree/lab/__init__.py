"""The laboratory measures, draws, reproduces and serves a page; the library never imports it."""
