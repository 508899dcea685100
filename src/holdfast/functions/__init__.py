"""Users' Python functions, for targets, graders, tools and simulated users.

`loading`    finds a function by its file or module, loads it once, and identifies the code it depends on
`observing`  records which files of the project functions read
`calling`    calls a function with the values that its parameters name, and describes its exceptions
`callables`  functions that are passed from Python, even from a notebook: their references and identities
"""

from holdfast.functions.calling import Function as Function
from holdfast.functions.calling import describe_error as describe_error
from holdfast.functions.calling import user_error as user_error
from holdfast.functions.calling import user_errors as user_errors
from holdfast.functions.calling import user_traceback as user_traceback
from holdfast.functions.loading import find_function as find_function
from holdfast.functions.loading import function_source as function_source
from holdfast.functions.loading import load_function as load_function
from holdfast.functions.loading import parameters_of as parameters_of
