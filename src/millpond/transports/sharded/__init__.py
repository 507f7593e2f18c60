"""A store made of stores: several databases that form one pond."""
