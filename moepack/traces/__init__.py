"""Traces: the experts that routers selected, token by token, in files of any format.

It defines a trace, checks it, and has moepack's own file. Other programs' formats are in `formats`;
other rooms record new traces and measure them.
"""
