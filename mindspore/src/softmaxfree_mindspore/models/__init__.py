"""The backbones, and their weights as softmaxfree has them."""
