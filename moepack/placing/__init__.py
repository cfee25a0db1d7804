"""What goes where: a model's weights and context on the memories of a machine, for an engine.

Dense weights and the context come first, then whole layers of experts, single ones only for engines
that take them. Knows bytes and what engines let one say; how fast that is, is forecast elsewhere.
"""
