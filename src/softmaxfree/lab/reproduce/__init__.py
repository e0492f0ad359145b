"""The paper's claims, tested at a scale that two cores can carry: `softmaxfree reproduce NAME`."""
