"""One trainer: reads clicks, runs the model, pulls parameters, pushes gradients."""
