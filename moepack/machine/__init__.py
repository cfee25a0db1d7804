"""What is known of a computer that runs models: memory, GPUs, the drive, and how we know it.

Measures what can be measured, reads what drivers and the kernel say, and keeps it in a file in
which the rest is typed. What this is worth to a model is for others to say.
"""
