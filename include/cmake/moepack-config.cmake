# find_package(moepack) gives the target moepack::moepack: the folder of moepack.h.
#
#     cmake -B build -DCMAKE_PREFIX_PATH="$(moepack include-dir)"
#
#     find_package(moepack 0.1 REQUIRED)
#     target_link_libraries(engine PRIVATE moepack::moepack)
#
# find_package(moepack COMPONENTS cache) also gives moepack::cache: the library of moepack_cache.h,
# compiled from native/, which needs the language C. Its functions include those of moepack.h.

if(NOT TARGET moepack::moepack)
  get_filename_component(_moepack_include "${CMAKE_CURRENT_LIST_DIR}/.." ABSOLUTE)
  add_library(moepack::moepack INTERFACE IMPORTED)
  set_target_properties(moepack::moepack PROPERTIES
    INTERFACE_INCLUDE_DIRECTORIES "${_moepack_include}"
    INTERFACE_COMPILE_DEFINITIONS _FILE_OFFSET_BITS=64)
  unset(_moepack_include)
endif()

if("cache" IN_LIST moepack_FIND_COMPONENTS AND NOT TARGET moepack::cache)
  get_filename_component(_moepack_native "${CMAKE_CURRENT_LIST_DIR}/../../native" ABSOLUTE)
  set(_moepack_sources cache drive guesses library order pool prompts reads residents slots)
  list(TRANSFORM _moepack_sources PREPEND "${_moepack_native}/")
  list(TRANSFORM _moepack_sources APPEND ".c")
  # Shared, so that the names inside it are its own.
  add_library(moepack_cache SHARED ${_moepack_sources})
  set_target_properties(moepack_cache PROPERTIES
    C_STANDARD 11 C_STANDARD_REQUIRED ON C_VISIBILITY_PRESET hidden)
  target_link_libraries(moepack_cache PUBLIC moepack::moepack PRIVATE m pthread)
  add_library(moepack::cache ALIAS moepack_cache)
  unset(_moepack_native)
  unset(_moepack_sources)
endif()
