"""The paper's figures, drawn anew from any model and any images: `softmaxfree figures NAME`."""
