"""Will it fit? Counted on meta, before any rank starts."""
