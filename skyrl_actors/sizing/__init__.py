"""Choose a layout for a model and the devices that are there."""
