# Lets find_package(MLX), find_package(dnnl) and find_package(nanobind) find what pip installed for ${Python_EXECUTABLE}.
# What the caller has set (MLX_ROOT, dnnl_DIR, CMAKE_PREFIX_PATH, ...) wins.
function(cleave_ask_python variable code)
  execute_process(
    COMMAND "${Python_EXECUTABLE}" -c "${code}"
    OUTPUT_VARIABLE answer OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE failed)
  if(failed)
    set(answer "")
  endif()
  set(${variable} "${answer}" PARENT_SCOPE)
endfunction()

if(NOT MLX_ROOT AND NOT MLX_DIR)
  cleave_ask_python(MLX_ROOT "import importlib.util as u; print(u.find_spec('mlx').submodule_search_locations[0])")
endif()
if(NOT dnnl_DIR)
  cleave_ask_python(
    dnnl_DIR "import sysconfig, os; p = os.path.join(sysconfig.get_path('data'), 'lib', 'cmake', 'dnnl'); print(p if os.path.isdir(p) else '')")
endif()
if(NOT nanobind_DIR)
  cleave_ask_python(nanobind_DIR "import nanobind; print(nanobind.cmake_dir())")
endif()
