"""ScienceWorld: 30 kinds of elementary science experiments in a simulated house, played by the original simulator."""
