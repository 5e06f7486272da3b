func.func private @_mlir_ciface_pbk_trace(i64, i64, i64)
func.func @k0_body(%a0: memref<32xf32> {llvm.noalias}, %a1: memref<32xf32> {llvm.noalias}, %arena: memref<256xi8> {llvm.noalias}, %low: index, %high: index) {
%v3 = arith.constant 0 : i32
%v5 = arith.constant 7 : i32
%v8 = arith.constant 8 : index
%v12 = arith.constant 0x41500000 : f32
%v15 = arith.constant 0 : index
%v18 = arith.constant 1 : i32
%v40 = arith.constant 1 : index
%v43 = arith.constant 64 : index
%v44 = arith.constant 128 : index
%v45 = arith.constant 192 : index
%t4 = memref.view %arena[%v15][] : memref<256xi8> to memref<1xi32>
%t8 = memref.view %arena[%v43][] : memref<256xi8> to memref<1xi32>
%t7 = memref.view %arena[%v44][] : memref<256xi8> to memref<1xi32>
%t6 = memref.view %arena[%v45][] : memref<256xi8> to memref<1xf32>
%t0 = memref.view %arena[%v15][] : memref<256xi8> to memref<1xi32>
scf.for %p = %low to %high step %v40 {
%v9 = arith.muli %p, %v8 : index
scf.for %v1 = %v15 to %v8 step %v40 {
%v2 = arith.index_cast %v1 : index to i32
%v4 = arith.maxsi %v2, %v3 : i32
%v6 = arith.minsi %v4, %v5 : i32
%v7 = arith.index_cast %v6 : i32 to index
%v10 = arith.addi %v9, %v7 : index
%v11 = memref.load %a0[%v10] : memref<32xf32>
%v13 = arith.cmpf oeq, %v11, %v12 : f32
%v14 = arith.extui %v13 : i1 to i32
memref.store %v14, %t4[%v15] : memref<1xi32>
%v16 = memref.load %t4[%v15] : memref<1xi32>
%v17 = arith.maxsi %v16, %v3 : i32
%v19 = arith.minsi %v17, %v18 : i32
%v20 = arith.index_cast %v19 : i32 to index
%v21 = arith.cmpi eq, %v20, %v15 : index
scf.if %v21 {
} else {
%v22 = arith.index_cast %v1 : index to i32
%v23 = arith.maxsi %v22, %v3 : i32
%v24 = arith.minsi %v23, %v5 : i32
%v25 = arith.index_cast %v24 : i32 to index
%v26 = arith.addi %v9, %v25 : index
%v27 = memref.load %a0[%v26] : memref<32xf32>
memref.store %v27, %t6[%v15] : memref<1xf32>
%v28 = arith.index_cast %v1 : index to i32
memref.store %v28, %t7[%v15] : memref<1xi32>
%v29 = arith.index_cast %p : index to i32
memref.store %v29, %t8[%v15] : memref<1xi32>
%v30 = arith.constant 7 : i64
%v31 = memref.extract_aligned_pointer_as_index %t6 : memref<1xf32> -> index
%v32 = arith.index_cast %v31 : index to i64
%v33 = arith.constant 0 : i64
func.call @_mlir_ciface_pbk_trace(%v30, %v33, %v32) : (i64, i64, i64) -> ()
%v34 = memref.extract_aligned_pointer_as_index %t7 : memref<1xi32> -> index
%v35 = arith.index_cast %v34 : index to i64
%v36 = arith.constant 1 : i64
func.call @_mlir_ciface_pbk_trace(%v30, %v36, %v35) : (i64, i64, i64) -> ()
%v37 = memref.extract_aligned_pointer_as_index %t8 : memref<1xi32> -> index
%v38 = arith.index_cast %v37 : index to i64
%v39 = arith.constant 2 : i64
func.call @_mlir_ciface_pbk_trace(%v30, %v39, %v38) : (i64, i64, i64) -> ()
}
}
%v41 = arith.index_cast %v8 : index to i32
memref.store %v41, %t0[%v15] : memref<1xi32>
%v42 = vector.load %a0[%v9] : memref<32xf32>, vector<8xf32>
vector.store %v42, %a1[%v9] : memref<32xf32>, vector<8xf32>
}
return
}
func.func private @k0_body(!llvm.ptr, !llvm.ptr, !llvm.ptr, i64, i64)
func.func private @pbk_task0(%args: !llvm.ptr, %low: i64, %high: i64, %slot: i64) {
%g0 = llvm.getelementptr %args[0] : (!llvm.ptr) -> !llvm.ptr, i8
%p0 = llvm.load %g0 : !llvm.ptr -> !llvm.ptr
%g1 = llvm.getelementptr %args[8] : (!llvm.ptr) -> !llvm.ptr, i8
%p1 = llvm.load %g1 : !llvm.ptr -> !llvm.ptr
%g2 = llvm.getelementptr %args[16] : (!llvm.ptr) -> !llvm.ptr, i8
%p2 = llvm.load %g2 : !llvm.ptr -> !llvm.ptr
%size = arith.constant 256 : i64
%at = arith.muli %slot, %size : i64
%mine = llvm.getelementptr %p2[%at] : (!llvm.ptr, i64) -> !llvm.ptr, i8
func.call @k0_body(%p0, %p1, %mine, %low, %high) : (!llvm.ptr, !llvm.ptr, !llvm.ptr, i64, i64) -> ()
return
}
func.func @pbk_main(%frame: !llvm.ptr, %buffers: !llvm.ptr, %arena: !llvm.ptr) {
%h1 = arith.constant 1 : i64
%h2 = llvm.alloca %h1 x !llvm.array<3 x ptr> : (i64) -> !llvm.ptr
%h3 = llvm.getelementptr %arena[0] : (!llvm.ptr) -> !llvm.ptr, i8
%h4 = llvm.getelementptr %buffers[0] : (!llvm.ptr) -> !llvm.ptr, i8
%h5 = llvm.load %h4 : !llvm.ptr -> !llvm.ptr
%h6 = llvm.getelementptr %buffers[8] : (!llvm.ptr) -> !llvm.ptr, i8
%h7 = llvm.load %h6 : !llvm.ptr -> !llvm.ptr
%h8 = llvm.getelementptr %h2[0] : (!llvm.ptr) -> !llvm.ptr, i8
llvm.store %h5, %h8 : !llvm.ptr, !llvm.ptr
%h9 = llvm.getelementptr %h2[8] : (!llvm.ptr) -> !llvm.ptr, i8
llvm.store %h7, %h9 : !llvm.ptr, !llvm.ptr
%h10 = llvm.getelementptr %h2[16] : (!llvm.ptr) -> !llvm.ptr, i8
llvm.store %h3, %h10 : !llvm.ptr, !llvm.ptr
%h11 = arith.constant 4 : i64
%h12 = arith.constant 0 : i64
func.call @pbk_task0(%h2, %h12, %h11, %h12) : (!llvm.ptr, i64, i64, i64) -> ()
return
}
