"""Traces: which experts were chosen, token by token, whatever file they were written to.

It knows what a trace is, how one is checked, and moepack's own file. Other people's formats are in
`formats`, recording of new traces in `recording`; what a trace says is measured in other rooms.
"""
