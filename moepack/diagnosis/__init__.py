"""What limits a machine that runs models, now: checks, each with its verdict and what to do.

Measures through `bench` and `machine`, forecasts through `forecasting`, and asks the system what it
allows by trying it. Knows what a finding means for `run` and `serve`, and changes nothing.
"""
