"""What the machine can do, what a step costs, and how long it took. One module for each:

device (ceilings) · timing · memory · costs (predictions) · records (Measurement) · bench · doctor
"""
