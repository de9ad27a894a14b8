"""HTTP itself: reading bodies, writing streams, who may ask, and what is written down."""
