"""A stage's heads out of a layer's input and the way back: what is done to a head before and after it travels."""
