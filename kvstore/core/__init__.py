"""The pure core of a store node: plain synchronous code over plain data, standard library only.

Nothing here opens a socket or a file, looks at a clock or draws a random number. The door is `store_state.StoreState`; what goes in
and comes out is in `events`.
"""
