# find_package(moepack) gives the target moepack::moepack: the folder of moepack.h.
#
#     cmake -B build -DCMAKE_PREFIX_PATH="$(moepack include-dir)"
#
#     find_package(moepack 0.1 REQUIRED)
#     target_link_libraries(engine PRIVATE moepack::moepack)

if(NOT TARGET moepack::moepack)
  get_filename_component(_moepack_include "${CMAKE_CURRENT_LIST_DIR}/.." ABSOLUTE)
  add_library(moepack::moepack INTERFACE IMPORTED)
  set_target_properties(moepack::moepack PROPERTIES
    INTERFACE_INCLUDE_DIRECTORIES "${_moepack_include}"
    INTERFACE_COMPILE_DEFINITIONS _FILE_OFFSET_BITS=64)
  unset(_moepack_include)
endif()
