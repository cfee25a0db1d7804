"""llama.cpp's own server, which runs unless another program is named, and its clients.

It knows the server's options, who may ask it, what is computed together or in turn, and those who
ask: chats, answers to prompts, recordings of what prompts are routed to.
"""
