"""ALFWorld: household tasks as a text game. Engine, oracle, generator, game stores and the environment adapter."""
