"""Models: pure functions of parameters and inputs; they know no mesh, config or loop."""
