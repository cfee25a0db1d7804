"""A model behind HTTP, with the interface that OpenAI's clients speak.

It knows requests, answers, and who waits for what; texts are made by `running`.
"""
